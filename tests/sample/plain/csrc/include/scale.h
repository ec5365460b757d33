// Included by scale.cpp alone.
#pragma once

constexpr int kScale = 3;
