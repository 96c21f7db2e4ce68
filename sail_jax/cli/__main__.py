"""`python -m sail_jax.cli` is the `sail-jax` command."""

import sys

from sail_jax.cli.main import main

sys.exit(main())
