"""The program mantissa as a Python package: `mantissa` and `python -m mantissa` start it. The codecs in NumPy are mantissa_formats."""
