"""What a run is made of: settings of the algorithm, clients, adapters, own functions."""
