// Included by add.cpp and scale.cpp.
#pragma once

constexpr int kShared = 100;
