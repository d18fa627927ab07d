"""The simulator: the decision loop driven in virtual time by SimPy, on a device model made of measured samples."""
