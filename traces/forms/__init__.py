"""The file forms of the native trace: JSON in rows or columns, and `.npz`."""
