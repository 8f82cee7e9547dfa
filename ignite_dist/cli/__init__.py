"""The command line: ``python -m ignite_dist env | check | bench | run``, with or without a launcher.

``check`` and ``bench`` run on every rank. Workers import ``check.py`` and ``bench.py``, so these modules do
not import the modules that print.
"""
