"""The `wanfp4` command."""
