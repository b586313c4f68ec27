// Stands in for the CUDA driver: kernels are structs of C functions, and launches write down their parameters.
#include <stdio.h>
#include <string.h>

struct kernel { int count; int sizes[96]; void (*run)(void **); };
struct config { unsigned grid[3], block[3], shared; void *stream; void *attributes; unsigned count; };

static char record[1 << 20];
static char *end = record;
static int failure, captures;

const char *take(void) { end = record; return record; }
void fail(int status) { failure = status; }
void capture(int status) { captures = status; }

static int note(struct kernel *kernel, unsigned *sizes, void *stream, void **parameters) {
  end += sprintf(end, "%p", (void *)kernel);
  for (int i = 0; i < 7; ++i) end += sprintf(end, " %u", sizes[i]);
  end += sprintf(end, " %p", stream);
  for (int i = 0; i < kernel->count; ++i) {
    unsigned long long value = 0;
    memcpy(&value, parameters[i], kernel->sizes[i]);
    end += sprintf(end, " %llx", value);
  }
  end += sprintf(end, "\n");
  if (kernel->run) kernel->run(parameters);
  return failure;
}

int cuLaunchKernel(struct kernel *kernel, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **parameters, void **extra) {
  unsigned sizes[] = {x, y, z, bx, by, bz, shared};
  return note(kernel, sizes, stream, parameters);
}

int cuLaunchKernelEx(struct config *config, struct kernel *kernel, void **parameters, void **extra) {
  return config->count ? 1 : note(kernel, config->grid, config->stream, parameters);
}

int cuFuncGetParamInfo(struct kernel *kernel, size_t i, size_t *offset, size_t *size) {
  if (i >= (size_t)kernel->count) return 1;
  *size = kernel->sizes[i];
  return 0;
}

int cuStreamIsCapturing(void *stream, int *status) { *status = captures; return 0; }
int cuGetErrorString(int status, const char **message) { *message = "a failure of the test"; return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuCtxGetCurrent(void **context) { *context = record; return 0; }
int cuCtxSetCurrent(void *context) { return 0; }
int cuDeviceGet(int *device, int i) { *device = i; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = record; return 0; }
int cuFuncSetAttribute(void *function, int attribute, int value) { return 0; }
int cuPointerGetAttribute(void **data, int attribute, void *pointer) { *data = pointer; return 0; }

// out[i] = x[i] * y[i] * factor; the last two parameters are Triton's, null without scratch memory.
static void product(void **parameters) {
  double *out = *(double **)parameters[0], *x = *(double **)parameters[1], *y = *(double **)parameters[2];
  int n = *(int *)parameters[3];
  float factor = *(float *)parameters[4];
  for (int i = 0; i < n && !*(void **)parameters[5] && !*(void **)parameters[6]; ++i) out[i] = x[i] * y[i] * factor;
}
struct kernel product_kernel = {7, {8, 8, 8, 4, 4, 8, 8}, product};
