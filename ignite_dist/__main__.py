"""``python -m ignite_dist``: see :mod:`ignite_dist.cli`."""

if __name__ == "__main__":  # workers import this module again and must not start the command
    import sys

    from ignite_dist.cli.main import main

    sys.exit(main())
