// blocks.h, with the headers of the standard library that its users took from here.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "blocks.h"
