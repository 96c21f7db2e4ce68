"""Runs the `sail-jax` command as `python -m sail_jax.cli`."""

import sys

from sail_jax.cli.main import main

sys.exit(main())
