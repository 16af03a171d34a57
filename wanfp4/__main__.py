"""`python -m wanfp4` is `wanfp4`."""

from wanfp4.cli.main import main

main()
