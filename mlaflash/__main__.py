"""``python -m mlaflash``."""

from mlaflash.commands.main import main

if __name__ == "__main__":
    main(prog_name="mlaflash")
