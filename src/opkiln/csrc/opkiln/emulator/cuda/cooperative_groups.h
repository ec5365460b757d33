// Replaces CUDA's header of this name.
#pragma once

#include "../groups.h"
