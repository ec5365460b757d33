// Compile-time parameters of an op (`variants=`, `tune=`) whose names are one letter.
//
// opkiln passes HEAD as -DHEAD=64, but T as -DOPKILN_PARAMETER_T=half: a macro T would replace the template
// parameters of every header that is included after it. op.h includes this file last.
#pragma once

#ifdef OPKILN_PARAMETER_A
#define A OPKILN_PARAMETER_A
#endif
#ifdef OPKILN_PARAMETER_B
#define B OPKILN_PARAMETER_B
#endif
#ifdef OPKILN_PARAMETER_C
#define C OPKILN_PARAMETER_C
#endif
#ifdef OPKILN_PARAMETER_D
#define D OPKILN_PARAMETER_D
#endif
#ifdef OPKILN_PARAMETER_E
#define E OPKILN_PARAMETER_E
#endif
#ifdef OPKILN_PARAMETER_F
#define F OPKILN_PARAMETER_F
#endif
#ifdef OPKILN_PARAMETER_G
#define G OPKILN_PARAMETER_G
#endif
#ifdef OPKILN_PARAMETER_H
#define H OPKILN_PARAMETER_H
#endif
#ifdef OPKILN_PARAMETER_I
#define I OPKILN_PARAMETER_I
#endif
#ifdef OPKILN_PARAMETER_J
#define J OPKILN_PARAMETER_J
#endif
#ifdef OPKILN_PARAMETER_K
#define K OPKILN_PARAMETER_K
#endif
#ifdef OPKILN_PARAMETER_L
#define L OPKILN_PARAMETER_L
#endif
#ifdef OPKILN_PARAMETER_M
#define M OPKILN_PARAMETER_M
#endif
#ifdef OPKILN_PARAMETER_N
#define N OPKILN_PARAMETER_N
#endif
#ifdef OPKILN_PARAMETER_O
#define O OPKILN_PARAMETER_O
#endif
#ifdef OPKILN_PARAMETER_P
#define P OPKILN_PARAMETER_P
#endif
#ifdef OPKILN_PARAMETER_Q
#define Q OPKILN_PARAMETER_Q
#endif
#ifdef OPKILN_PARAMETER_R
#define R OPKILN_PARAMETER_R
#endif
#ifdef OPKILN_PARAMETER_S
#define S OPKILN_PARAMETER_S
#endif
#ifdef OPKILN_PARAMETER_T
#define T OPKILN_PARAMETER_T
#endif
#ifdef OPKILN_PARAMETER_U
#define U OPKILN_PARAMETER_U
#endif
#ifdef OPKILN_PARAMETER_V
#define V OPKILN_PARAMETER_V
#endif
#ifdef OPKILN_PARAMETER_W
#define W OPKILN_PARAMETER_W
#endif
#ifdef OPKILN_PARAMETER_X
#define X OPKILN_PARAMETER_X
#endif
#ifdef OPKILN_PARAMETER_Y
#define Y OPKILN_PARAMETER_Y
#endif
#ifdef OPKILN_PARAMETER_Z
#define Z OPKILN_PARAMETER_Z
#endif
