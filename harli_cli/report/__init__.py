"""The result of a run or a comparison as one HTML file that needs no network."""
