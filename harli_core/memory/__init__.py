"""Memory bookkeeping: who owns each row, slot and block. It decides and counts; a `PageProvider` has the bytes."""
