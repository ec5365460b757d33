// Replaces CUDA's header of this name.
#pragma once

#define __CUDA_BF16_H__
#define __CUDA_BF16_TYPES_EXIST__

#include "../half.h"
#include "../language.h"
