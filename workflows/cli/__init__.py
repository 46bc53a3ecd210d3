"""The command `pedigree`: its options, output, tables and progress."""
