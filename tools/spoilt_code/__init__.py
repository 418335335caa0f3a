"""The faults that spoil_code.py plants, by the package of source_code in which they lie."""
