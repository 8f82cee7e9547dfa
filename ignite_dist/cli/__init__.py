"""The command line: what this machine has, whether a set-up works, and how fast it is.

``python -m ignite_dist env | check | bench``, alone or under any launcher. Modules that workers import (what
runs on every rank) do not import those that print.
"""
