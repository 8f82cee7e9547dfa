"""Tests that run on several ranks: a plugin of pytest.

A test marked with ``ranks`` runs on every rank of a context. The plugin keeps the workers for the next test::

    import pytest
    import ignite_dist as idist

    @pytest.mark.ranks(2)
    def test_mean():
        assert idist.all_reduce(float(idist.get_rank()), "AVERAGE") == 0.5

Every worker runs pytest, so fixtures, parameters, ``pytest.raises``, skips, captured output and rewritten
assertions work as in any test. pytest loads the plugin by itself. The plugin imports this package and torch
only if a test has the marker.
"""
