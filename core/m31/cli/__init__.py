"""The command line. `m31.cli.main:main` is the entry point; each command imports what it needs when it runs."""
