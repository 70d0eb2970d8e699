/* What a generated kernel stands on, on a GPU: types, memory access of given widths, threads and barriers.
 *
 * A kernel is a row of phases, BARRIERs between them at the top level, and what one phase leaves for the next lies in
 * shared memory: nothing is kept in a thread's variables across a BARRIER, and no thread talks to another in between.  So
 * another header can run the same text on a CPU, thread after thread.
 */
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

#define FN static __device__ __forceinline__
#define SLOW static __device__ __noinline__
#define UNROLL _Pragma("unroll")
#define SOME _Pragma("unroll 2")
#define FEW _Pragma("unroll 4")

#define KERNEL(NAME, ...) extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) NAME(__VA_ARGS__)
#define PHASES(ROOM)                                                                                                     \
    {                                                                                                                    \
        extern __shared__ uint4 shared_words[];                                                                          \
        u8 *ROOM = (u8 *)shared_words;                                                                                   \
        const u32 block = blockIdx.x, thread = threadIdx.x;                                                              \
        {
#define BARRIER                                                                                                          \
    }                                                                                                                    \
    __syncthreads();                                                                                                     \
    {
#define END                                                                                                              \
    }                                                                                                                    \
    }

#define TO_FLOAT(bits) __uint_as_float(bits)
#define TO_BITS(real) __float_as_uint(real)
#define TO_DOUBLE(bits) __longlong_as_double((i64)(bits))
#define DOUBLE_BITS(real) ((u64)__double_as_longlong(real))
#define TIMES(a, b) times(a, b)
#define OVER(a, b) over(a, b)
#define WIDENED(real) widened(real)
#define NARROWED(real) narrowed(real)
#define TIMES_PLUS(a, b, c) __fmaf_rn(a, b, c)
#define SHIFTED_UP(x, by) shifted_up(x, by)
#define FUSED(a, b, c) fused(a, b, c)
#define PERMUTE(a, b, which) __byte_perm(a, b, which)
#define LARGER_HALVES(a, b) __vmaxu2(a, b)

/* As instructions, for compilers may be told to take what is denormal for 0 (CuPy tells them), and then intrinsics do. */
FN float times(float a, float b)
{
    float c;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}
FN float over(float a, float b)
{
    float c;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}
FN float fused(float a, float b, float c)
{
    float d;
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));
    return d;
}
/* By 32 and more too, which leaves 0. */
FN u32 shifted_up(u32 x, u32 by)
{
    u32 found;
    asm("shl.b32 %0, %1, %2;" : "=r"(found) : "r"(x), "r"(by));
    return found;
}
FN double widened(float a)
{
    double c;
    asm("cvt.f64.f32 %0, %1;" : "=d"(c) : "f"(a));
    return c;
}
FN float narrowed(double a)
{
    float c;
    asm("cvt.rn.f32.f64 %0, %1;" : "=f"(c) : "d"(a));
    return c;
}

/* Global memory is read once and written once: nothing of it is worth keeping in a cache, but for the tables. */
FN void load16(u32 *t, u64 at)
{
    uint4 q = __ldcs((const uint4 *)at);
    t[0] = q.x, t[1] = q.y, t[2] = q.z, t[3] = q.w;
}
FN void load8(u32 *t, u64 at)
{
    uint2 q = __ldcs((const uint2 *)at);
    t[0] = q.x, t[1] = q.y;
}
FN void load4(u32 *t, u64 at) { t[0] = __ldcs((const u32 *)at); }
FN void load2(u32 *t, u64 at) { t[0] = __ldcs((const u16 *)at); }
FN void load1(u32 *t, u64 at) { t[0] = __ldcs((const u8 *)at); }
FN u32 kept4(u64 at) { return __ldg((const u32 *)at); } /* what many threads ask for */
FN void store16(u64 at, const u32 *t) { __stcs((uint4 *)at, make_uint4(t[0], t[1], t[2], t[3])); }
FN void store8(u64 at, const u32 *t) { __stcs((uint2 *)at, make_uint2(t[0], t[1])); }
FN void store4(u64 at, const u32 *t) { __stcs((u32 *)at, t[0]); }
FN void store2(u64 at, const u32 *t) { __stcs((u16 *)at, (u16)t[0]); }
FN void store1(u64 at, const u32 *t) { __stcs((u8 *)at, (u8)t[0]); }

FN void get16(u32 *t, const u8 *at)
{
    uint4 q = *(const uint4 *)at;
    t[0] = q.x, t[1] = q.y, t[2] = q.z, t[3] = q.w;
}
FN void get8(u32 *t, const u8 *at)
{
    uint2 q = *(const uint2 *)at;
    t[0] = q.x, t[1] = q.y;
}
FN void get4(u32 *t, const u8 *at) { t[0] = *(const u32 *)at; }
FN void get2(u32 *t, const u8 *at) { t[0] = *(const u16 *)at; }
FN void get1(u32 *t, const u8 *at) { t[0] = *at; }
FN void put16(u8 *at, const u32 *t) { *(uint4 *)at = make_uint4(t[0], t[1], t[2], t[3]); }
FN void put8(u8 *at, const u32 *t) { *(uint2 *)at = make_uint2(t[0], t[1]); }
FN void put4(u8 *at, const u32 *t) { *(u32 *)at = t[0]; }
FN void put2(u8 *at, const u32 *t) { *(u16 *)at = (u16)t[0]; }
FN void put1(u8 *at, const u32 *t) { *at = (u8)t[0]; }
#define GET_ADDRESS(at) (*(const u64 *)(at))
#define PUT_ADDRESS(at, value) (*(u64 *)(at) = (value))
#define TABLE(type, at) ((const type *)(at))
#define LOOK(pointer) __ldg(pointer)
