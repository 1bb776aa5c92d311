"""What a whole model would take on Trainium: kernels traced on the simulated NeuronCore."""
