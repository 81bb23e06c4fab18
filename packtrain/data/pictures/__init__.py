"""Pictures in the data: where they stand, how many tokens they take, their pixels."""
