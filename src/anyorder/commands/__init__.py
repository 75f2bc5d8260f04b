"""The commands: their arguments, and what each calls. cli.py lists them."""
