"""The kernels, by families of ops. A factory takes an op instance and gives a kernel, or says why not."""
