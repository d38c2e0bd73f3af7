"""`python -m jaxinfer`; the commands are in cli.py."""

from __future__ import annotations

import sys

from jaxinfer.cli import main

sys.exit(main())
