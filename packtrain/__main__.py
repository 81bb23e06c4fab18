"""`python -m packtrain` is the same as `packtrain`."""

from packtrain.cli import main

if __name__ == "__main__":
    main()
