"""Latency prediction (paper section 5): measured samples, the regressions fitted to them, their run-time evaluation.

`samples` and `profile` read what was measured and fitted, `fit` makes one from the other (the only user of
scikit-learn), `predictor` evaluates a profile at every decode step.
"""
