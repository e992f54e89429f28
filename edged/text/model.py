"""TextModel: one model's text side, as the ingress and the streams see it (seam; see text/)."""
