"""A candidate compared with the champion."""
