from first_op import scaled_add

from opkiln.testing import op_tests


def samples(make, size):
    return make(size), make(size), 0.5


TestScaledAdd = op_tests(scaled_add, samples)
