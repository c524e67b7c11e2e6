"""The kernels, one module for each family of ops. A factory takes an op instance and gives a kernel, or says why not."""
