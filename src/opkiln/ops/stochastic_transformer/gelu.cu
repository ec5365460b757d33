// The gelu of a training layer with the GPU's approximate tanh, whose error is up to 2^-11.
#define OPKILN_STOCHASTIC
#include "../transformer/columns.cu"
