"""What runs have recorded, as pages and commands show it: found, indexed, filtered, compared."""
