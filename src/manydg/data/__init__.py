"""Patient-labelled data: columns, datasets, folders, splits, pairs and the plan of an epoch."""
