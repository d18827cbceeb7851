"""`python -m tapfm`."""

from tapfm.cli.main import main

main()
