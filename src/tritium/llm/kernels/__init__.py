"""The operations of a decoder: one function per op (``ops``), its definition (``reference``) and fast forms."""
