"""`python -m stoker.cli`, for machines where the console script is not on the path."""

from stoker.cli import main

main()
