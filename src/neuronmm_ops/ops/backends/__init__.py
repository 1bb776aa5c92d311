"""What runs the ops: the CPU's products, the simulated NeuronCore, XLA and Neuron devices."""
