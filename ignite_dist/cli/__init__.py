"""The command line: what this machine has, whether a set-up works, and how fast it is.

``python -m ignite_dist env | check | bench``, alone or under any launcher. ``check`` and ``bench`` run on
every rank. Their modules do not import those that print, because workers import them too.
"""
