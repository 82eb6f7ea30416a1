"""Models that were written for one device, cut over ranks as they are: their layers over stages, weights over tp."""
