"""Decoding of continuous tokens: vectors that a diffusion head or a flow draws, position by position."""
