"""The reference decoder that ``xmoe train`` trains."""
