/* Memory whose end is an unmapped page, for finding kernels that reach beyond what they are given.
 *
 * Loaded with LD_PRELOAD it takes the place of malloc and its relatives. While it is armed, blocks come from a large
 * reserved range in which nothing but them is mapped:
 *
 *   BACK    the last byte of a block is the last byte before an unmapped page
 *   FRONT   the first byte of a block is the first byte after an unmapped page
 *   ALIGNED as BACK, but aligned to 64 bytes as PyTorch's own allocator does
 *
 * What remains of the page on the other side is filled with a pattern that must still be there when the block is freed.
 * A freed block is unmapped at once, and its address is not used again for a long time. A fault is written down with
 * the block that it belongs to, and ends the process.
 *
 * Linux with glibc on x86-64. PyTorch's tensors are told from other blocks by who asks: libc10.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <link.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <ucontext.h>
#include <unistd.h>

extern void *__libc_malloc(size_t);
extern void __libc_free(void *);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);

#define PAGE 4096UL
#define SLOT (1UL << 18)          /* Blocks begin so far apart; the rest is unmapped. */
#define SLOTS (1UL << 20)         /* 256 GiB of addresses. */
#define MOST_TENSORS 12000        /* Each block takes two entries of the kernel's table of mappings. */
#define MOST_OTHERS 4000          /* What is not guarded then, because caches keep it, may be guarded the next time. */
#define CANARY 0xC7
#define FRAMES 48
#define NAME 160

enum { BACK, FRONT, ALIGNED };
enum { TENSORS = 1, EVERYTHING = 2 };

typedef struct {
  uintptr_t start;   /* What the caller was given. */
  size_t size;
  uint32_t slots;    /* How many slots it covers; 0 in all but its first. */
  uint32_t earlier, later; /* Its neighbours among the live blocks; 0 for none. */
  uint32_t call;     /* The call that it was made in. */
  uint8_t is_live, place;
} Block;

typedef struct {
  int64_t signal, code, address, is_write;
  int64_t block_size;  /* -1 if the address belongs to no block. */
  int64_t before, beyond; /* Distance in bytes to the first byte of the block, or from its end; 0 if inside. */
  int64_t was_freed, frames;
  char names[FRAMES][NAME];
} Fault;

static uint8_t *arena;
static Block *blocks;
static uint32_t newest; /* The live block that was made last. */
static uint32_t call;   /* Calls that were begun. */
static size_t next_slot = 1, live_blocks, live_bytes, most_bytes = 1UL << 28, broken_blocks;
static volatile int armed, place = BACK, filling = 0;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uintptr_t c10_low, c10_high;
static Fault *fault;  /* Memory that the parent process reads. */

static int is_ours(const void *pointer) {
  return arena && (uint8_t *)pointer >= arena && (uint8_t *)pointer < arena + SLOT * SLOTS;
}

static size_t round_up(size_t size, size_t to) { return (size + to - 1) & ~(to - 1); }

static size_t find_slots(size_t wanted) {
  for (size_t tries = 0; tries < SLOTS; ) {
    if (next_slot + wanted >= SLOTS) next_slot = 1;
    size_t free_until = next_slot;
    while (free_until < next_slot + wanted && !blocks[free_until].is_live) free_until++;
    if (free_until == next_slot + wanted) {
      size_t found = next_slot;
      next_slot += wanted;
      return found;
    }
    /* Go on behind the block that is in the way. */
    tries += free_until + 1 - next_slot;
    next_slot = free_until + (blocks[free_until].slots ? blocks[free_until].slots : 1);
  }
  return 0;
}

static void *guarded(size_t size, size_t alignment, int is_tensor) {
  size_t pages = round_up(size + (alignment > PAGE ? alignment : 0), PAGE);
  size_t wanted = (pages + 2 * PAGE + SLOT / 2 + SLOT - 1) / SLOT;
  pthread_mutex_lock(&lock);
  size_t slot = live_bytes + pages > most_bytes ? 0 : find_slots(wanted);
  if (!slot) {
    pthread_mutex_unlock(&lock);
    errno = ENOMEM;
    return NULL;
  }
  uint8_t *low = arena + slot * SLOT + PAGE;
  if (mprotect(low, pages, PROT_READ | PROT_WRITE)) {
    pthread_mutex_unlock(&lock);
    errno = ENOMEM;
    return NULL;
  }
  uintptr_t start = (uintptr_t)low;
  if (place != FRONT || alignment > PAGE) {
    start += pages - size;
    if (!is_tensor || place == ALIGNED) start &= ~(alignment - 1);
  }
  Block *block = &blocks[slot];
  block->start = start;
  block->size = size;
  block->slots = (uint32_t)wanted;
  block->place = (uint8_t)place;
  for (size_t index = 0; index < wanted; index++) blocks[slot + index].is_live = 1;
  block->earlier = newest;
  block->later = 0;
  block->call = call;
  if (newest) blocks[newest].later = (uint32_t)slot;
  newest = (uint32_t)slot;
  live_blocks++;
  live_bytes += pages;
  pthread_mutex_unlock(&lock);
  memset(low, CANARY, start - (uintptr_t)low);
  memset((uint8_t *)start + size, CANARY, (uintptr_t)low + pages - start - size);
  if (filling && size <= 1UL << 16) memset((void *)start, filling, size);
  return (void *)start;
}

static Block *block_of(const void *pointer) {
  size_t slot = (size_t)((uint8_t *)pointer - arena) / SLOT;
  while (slot && !blocks[slot].slots) slot--;
  return slot ? &blocks[slot] : NULL;
}

static size_t pages_of(const Block *block) {
  uintptr_t low = (uintptr_t)(arena + (size_t)(block - blocks) * SLOT + PAGE);
  return round_up(block->start + block->size - low ? block->start + block->size - low : 1, PAGE);
}

/* Whether the pattern beside a block is as it was. */
static int is_whole(const Block *block) {
  uint8_t *low = arena + (size_t)(block - blocks) * SLOT + PAGE, *high = low + pages_of(block);
  for (uint8_t *at = low; at < (uint8_t *)block->start; at++) if (*at != CANARY) return 0;
  for (uint8_t *at = (uint8_t *)block->start + block->size; at < high; at++) if (*at != CANARY) return 0;
  return 1;
}

static void write_fault(int number, int code, uintptr_t address, int is_write);

static void release(void *pointer) {
  Block *block = block_of(pointer);
  if (!block || !block->is_live || block->start != (uintptr_t)pointer) {
    write_fault(SIGABRT, -1, (uintptr_t)pointer, 1);
    _exit(86);
  }
  int broken = !is_whole(block);
  if (broken && fault && !fault->signal) {
    write_fault(SIGBUS, -2, block->start, 1);
  }
  size_t pages = pages_of(block);
  uint8_t *low = arena + (size_t)(block - blocks) * SLOT + PAGE;
  pthread_mutex_lock(&lock);
  broken_blocks += broken;
  madvise(low, pages, MADV_DONTNEED);
  mprotect(low, pages, PROT_NONE);
  for (size_t index = 0; index < block->slots; index++) (block + index)->is_live = 0;
  if (block->earlier) blocks[block->earlier].later = block->later;
  if (block->later) blocks[block->later].earlier = block->earlier;
  else newest = block->earlier;
  live_blocks--;
  live_bytes -= pages;
  pthread_mutex_unlock(&lock);
}

static int is_guarded(size_t size, int kind) {
  return armed && (armed & kind) && arena && live_blocks < (kind == TENSORS ? MOST_TENSORS : MOST_OTHERS) && size;
}

/* The interface of malloc. */

int posix_memalign(void **made, size_t alignment, size_t size) {
  uintptr_t caller = (uintptr_t)__builtin_return_address(0);
  int is_tensor = caller >= c10_low && caller < c10_high;
  if (is_guarded(size, is_tensor ? TENSORS : EVERYTHING)) {
    void *found = guarded(size, alignment, is_tensor);
    if (!found) return ENOMEM;
    *made = found;
    return 0;
  }
  void *found = __libc_memalign(alignment, size);
  if (!found) return ENOMEM;
  *made = found;
  return 0;
}

void *memalign(size_t alignment, size_t size) {
  return is_guarded(size, EVERYTHING) ? guarded(size, alignment, 0) : __libc_memalign(alignment, size);
}

void *aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }

void *malloc(size_t size) {
  return is_guarded(size, EVERYTHING) ? guarded(size, 16, 0) : __libc_malloc(size);
}

void *calloc(size_t count, size_t size) {
  size_t bytes;
  if (__builtin_mul_overflow(count, size, &bytes) || !is_guarded(bytes, EVERYTHING)) return __libc_calloc(count, size);
  void *made = guarded(bytes, 16, 0);
  if (made) memset(made, 0, bytes);
  return made;
}

void free(void *pointer) {
  if (is_ours(pointer)) release(pointer);
  else __libc_free(pointer);
}

void *realloc(void *pointer, size_t size) {
  if (!is_ours(pointer)) return __libc_realloc(pointer, size);
  if (!size) {
    release(pointer);
    return NULL;
  }
  size_t before = block_of(pointer)->size;
  void *made = malloc(size);
  if (made) {
    memcpy(made, pointer, before < size ? before : size);
    release(pointer);
  }
  return made;
}

size_t malloc_usable_size(void *pointer) {
  static size_t (*real)(void *);
  if (is_ours(pointer)) return block_of(pointer)->size;
  if (!real) real = (size_t (*)(void *))dlsym(RTLD_NEXT, "malloc_usable_size");
  return real(pointer);
}

/* Faults. */

static void write_fault(int number, int code, uintptr_t address, int is_write) {
  if (!fault) return;
  armed = 0;
  fault->signal = number;
  fault->code = code;
  fault->address = (int64_t)address;
  fault->is_write = is_write;
  fault->block_size = -1;
  fault->before = fault->beyond = fault->was_freed = 0;
  if (is_ours((void *)address)) {
    /* A fault between two blocks belongs to the nearer one. */
    size_t slot = (size_t)(address - (uintptr_t)arena) / SLOT;
    Block *best = NULL;
    int64_t nearest = INT64_MAX;
    for (size_t at = slot > 64 ? slot - 64 : 0; at <= slot + 64 && at < SLOTS; at++) {
      Block *block = &blocks[at];
      if (!block->slots) continue;
      int64_t before = (int64_t)block->start - (int64_t)address;
      int64_t beyond = (int64_t)address - (int64_t)(block->start + block->size);
      int64_t distance = before > 0 ? before : beyond >= 0 ? beyond + 1 : 0;
      if (distance < nearest) {
        nearest = distance;
        best = block;
        fault->before = before > 0 ? before : 0;
        fault->beyond = beyond >= 0 ? beyond + 1 : 0;
      }
    }
    if (best) {
      fault->block_size = (int64_t)best->size;
      fault->was_freed = !best->is_live;
    }
  }
  void *frames[FRAMES];
  int count = backtrace(frames, FRAMES);
  fault->frames = count;
  for (int index = 0; index < count; index++) {
    Dl_info info;
    char *name = fault->names[index];
    name[0] = 0;
    if (dladdr(frames[index], &info)) {
      const char *library = info.dli_fname ? strrchr(info.dli_fname, '/') : NULL;
      if (info.dli_sname) snprintf(name, NAME, "%s", info.dli_sname);
      else snprintf(name, NAME, "%s+0x%lx", library ? library + 1 : "?",
                    (unsigned long)((uintptr_t)frames[index] - (uintptr_t)info.dli_fbase));
    }
  }
}

static void on_signal(int number, siginfo_t *info, void *context) {
  static volatile int is_inside;
  if (!is_inside) {
    is_inside = 1;
    int is_write = 0;
#ifdef __x86_64__
    is_write = number == SIGSEGV && (((ucontext_t *)context)->uc_mcontext.gregs[REG_ERR] & 2);
#endif
    write_fault(number, info->si_code, (uintptr_t)info->si_addr, is_write);
  }
  _exit(number == SIGPROF ? 87 : 86);
}

/* What Python calls. */

static int find_c10(struct dl_phdr_info *info, size_t size, void *unused) {
  (void)size, (void)unused;
  if (!info->dlpi_name || !strstr(info->dlpi_name, "libc10.so")) return 0;
  for (int index = 0; index < info->dlpi_phnum; index++) {
    const ElfW(Phdr) *part = &info->dlpi_phdr[index];
    if (part->p_type != PT_LOAD) continue;
    uintptr_t low = info->dlpi_addr + part->p_vaddr, high = low + part->p_memsz;
    if (!c10_low || low < c10_low) c10_low = low;
    if (high > c10_high) c10_high = high;
  }
  return 1;
}

/* Reserve the range, and write faults into `shared` from now on; 0 if all is well. */
int guarded_memory_open(void *shared, size_t shared_bytes) {
  if (shared_bytes < sizeof(Fault)) return 1;
  if (!arena) {
    void *made = mmap(NULL, SLOT * SLOTS, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    void *table = mmap(NULL, sizeof(Block) * SLOTS, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (made == MAP_FAILED || table == MAP_FAILED) return 2;
    blocks = table;
    arena = made;
    void *frames[4];
    backtrace(frames, 4); /* Loads what it needs, which a handler must not do. */
  }
  dl_iterate_phdr(find_c10, NULL);
  if (!c10_low) return 3;
  fault = shared;
  fault->signal = 0;
  static uint8_t stack[1 << 16];
  stack_t other = {.ss_sp = stack, .ss_size = sizeof stack};
  sigaltstack(&other, NULL);
  struct sigaction action = {.sa_sigaction = on_signal, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER};
  int numbers[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP, SIGPROF};
  for (size_t index = 0; index < sizeof numbers / sizeof *numbers; index++) sigaction(numbers[index], &action, NULL);
  return 0;
}

size_t guarded_memory_fault_bytes(void) { return sizeof(Fault); }

/* Guard blocks from now on: 0 none, 1 tensors, 3 all that is allocated. `byte` is what new blocks are filled with. */
void guarded_memory_arm(int what, int where, int byte) {
  place = where;
  filling = byte;
  armed = what;
}

/* Let the process compute for so long, and end it by SIGPROF then; 0 takes the limit away. */
void guarded_memory_limit(double cpu_s) {
  struct itimerval timer = {{0, 0}, {(long)cpu_s, (long)((cpu_s - (double)(long)cpu_s) * 1e6)}};
  setitimer(ITIMER_PROF, &timer, NULL);
}

void guarded_memory_bound(size_t bytes) { most_bytes = bytes; }

/* Begin a call: blocks that are older are looked at when they are freed. */
void guarded_memory_begin(void) { call++; }

/* Count the blocks of this call, and all that were freed, beside which something was written. */
size_t guarded_memory_broken(void) {
  size_t found = broken_blocks;
  for (uint32_t slot = newest; slot && blocks[slot].call == call; slot = blocks[slot].earlier) {
    Block *block = &blocks[slot];
    if (!is_whole(block)) {
      found++;
      if (fault && !fault->signal) {
        int was = armed;
        write_fault(SIGBUS, -2, block->start, 1);
        armed = was;
      }
    }
  }
  return found;
}

/* Write down that something at an address is wrong, of which only the caller knows what. */
void guarded_memory_note(int code, uintptr_t address) { write_fault(SIGBUS, code, address, 0); }

size_t guarded_memory_live(void) { return live_blocks; }
