"""From settings to what a round loop needs: data read and split, models known, misfits refused, the engine built."""
