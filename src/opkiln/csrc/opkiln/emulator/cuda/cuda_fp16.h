// Replaces CUDA's header of this name.
#pragma once

#define __CUDA_FP16_H__
#define __CUDA_FP16_TYPES_EXIST__

#include "../half.h"
#include "../language.h"
