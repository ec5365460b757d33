"""Random layer-token drop: layers that see some of the tokens, drawn anew in each step."""
