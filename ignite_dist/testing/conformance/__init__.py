"""The conformance suite: what every backend promises, as tests.

On a backend of your own::

    pytest --pyargs ignite_dist.testing.conformance --backend mine --ranks 2,3

Each case is a function that runs on every rank. ``docs/testing.md`` describes the options.
"""
