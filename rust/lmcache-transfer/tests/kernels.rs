//! The CUDA kernels, run on the host: against naive loops in C++ under sanitizers, and against the plans that
//! the host's own copies follow.

mod common;

use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::ptr;

use common::{Random, compile, root, scratch};
use libloading::Library;
use lmcache_core::layout::{CopyPlan, PagedLayout, Placement};
use lmcache_transfer::cuda::kernels::{
    CopyKernel, Direction, LaunchShape, Layers, PagedCopy, unit_slots,
};

/// Cases of each kernel; `check` alone runs as many as it is told.
const CASES: usize = 100_000;

/// Kernels that the check counts: 20 that copy, and 5 that zero, with which the 3 that rotate take turns.
const CHECKED: usize = 25;
/// Processes that share them.
const PARTS: usize = 2;

fn check(binary: &Path, cases: usize, part: usize, parts: usize) -> Command {
    let mut command = Command::new(binary);
    command.args([cases, 1, part, parts].map(|number| number.to_string()));
    command
}

#[test]
fn kernels_equal_the_naive_loop_under_sanitizers() {
    let source = root().join("csrc/emulation/check.cpp");
    let flags = [
        "-O1",
        "-g1",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=all",
    ];
    let binary = compile(
        &[source],
        &scratch("kernels").join("check-sanitized"),
        &flags,
    );
    let parts = (0..PARTS).map(|part| {
        check(&binary, CASES, part, PARTS)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the check starts")
    });
    let mut checked = 0;
    for part in parts.collect::<Vec<_>>() {
        let done = part.wait_with_output().expect("the check ends");
        let told = String::from_utf8_lossy(&done.stdout);
        let fault = String::from_utf8_lossy(&done.stderr);
        assert!(done.status.success(), "{told}{fault}");
        let kernels = told
            .trim()
            .strip_prefix(&format!("{CASES} cases of each of "));
        checked += kernels
            .and_then(|count| count.parse::<usize>().ok())
            .expect("it counts");
    }
    assert_eq!(checked, CHECKED);
}

/// Faults that the check must see: what stands in the source, and what is put there instead.
const PLANTED: &[(&str, &str, &str)] = &[
    ("paged_copy.cu", "slot < 0 || base == 0", "slot < 0"),
    ("paged_copy.cu", "(copy.skip) * runs", "(0) * runs"),
    (
        "paged_copy.cu",
        "left < copy.chunk_tokens ? left : copy.chunk_tokens",
        "copy.chunk_tokens",
    ),
    (
        "paged_copy.cu",
        "plane * copy.plane_stride",
        "0 * copy.plane_stride",
    ),
    ("paged_copy.cu", "if (slot >> 32 == 0) {", "if (true) {"),
    (
        "paged_copy.cu",
        "layers[copy.first_layer + layer]",
        "layers[layer]",
    ),
    (
        "paged_copy.cu",
        "const uint64_t in_layer =",
        "const uint32_t in_layer =",
    ),
    ("paged_copy.cu", "(; at < count;", "(; at + 1 < count;"),
    (
        "paged_copy.cu",
        "target[at + 2 * step] = third",
        "target[at + 2 * step] = fourth",
    ),
    (
        "paged_copy.cu",
        "at = threadIdx.x + static_cast<uint64_t>(blockIdx.z) * blockDim.x",
        "at = threadIdx.x",
    ),
    (
        "rope_shift.cu",
        "wanted[token] - stored[token]",
        "stored[token] - wanted[token]",
    ),
    (
        "rope_shift.cu",
        "shift.interleaved ? 2 * pair : pair",
        "pair",
    ),
    (
        "rope_shift.cu",
        "= distance *",
        "= static_cast<float>(distance) * (float)",
    ),
    (
        "rope_shift.cu",
        "stored[token] < 0 || stored[token]",
        "stored[token]",
    ),
    (
        "rope_shift.cu",
        "rest + 0xfffu + (rest >> 13 & 1u)",
        "rest + 0x1000u",
    ),
];

#[test]
fn planted_faults_are_seen() {
    let folder = scratch("planted");
    let csrc = root().join("csrc");
    let sources = ["paged_copy.h", "paged_copy.cu", "rope_shift.cu"];
    let harness = ["emulate.h", "emulate.cpp", "cuda_builtins.h", "check.cpp"];
    fs::create_dir_all(folder.join("emulation")).expect("scratch space");
    let copy = |name: &str| {
        fs::copy(csrc.join(name), folder.join(name)).expect("a source is there");
    };
    harness
        .iter()
        .for_each(|name| copy(&format!("emulation/{name}")));
    for (file, right, wrong) in PLANTED {
        sources.iter().for_each(|name| copy(name));
        let text = fs::read_to_string(folder.join(file)).expect("just copied");
        assert!(
            text.contains(right),
            "{file} has no {right:?} any more: plant another fault"
        );
        fs::write(folder.join(file), text.replacen(right, wrong, 1)).expect("scratch space");
        let source = folder.join("emulation/check.cpp");
        let quick = ["-O0", "-Wno-unused", "-Wno-unused-parameter"];
        let binary = compile(&[source], &folder.join("check"), &quick);
        let done = check(&binary, 300, 0, 1).output().expect("it starts");
        assert!(
            !done.status.success(),
            "nobody saw {wrong:?} for {right:?} in {file}"
        );
    }
}

type Emulate =
    unsafe extern "C" fn(*const c_char, *const c_uint, *const c_uint, *mut *mut c_void) -> c_int;

struct Emulation {
    emulate: Emulate,
    _library: Library,
}

impl Emulation {
    fn new() -> Self {
        let sources = [root().join("csrc/emulation/emulate.cpp")];
        let path = scratch("kernels").join("emulation.so");
        let built: PathBuf = compile(&sources, &path, &["-O2", "-fPIC", "-shared"]);
        // SAFETY: built just now; it has no initialisers.
        let library = unsafe { Library::new(built) }.expect("it loads");
        // SAFETY: the signature that emulate.h declares.
        let emulate = *unsafe { library.get::<Emulate>("lmc_emulate") }.expect("it is exported");
        Self {
            emulate,
            _library: library,
        }
    }

    fn launch(&self, kernel: CopyKernel, shape: LaunchShape, copy: &PagedCopy) {
        let name = CString::new(kernel.name()).expect("no NUL in it");
        let mut parameters = [ptr::from_ref(copy).cast_mut().cast::<c_void>()];
        // SAFETY: `copy` describes buffers of this test that outlive the call.
        let code = unsafe {
            (self.emulate)(
                name.as_ptr(),
                shape.grid.as_ptr(),
                shape.block.as_ptr(),
                parameters.as_mut_ptr(),
            )
        };
        assert_eq!(code, 0, "{} is refused at {shape:?}", kernel.name());
    }
}

/// A layout with the axes in a random order in memory and gaps between them, in units of `unit` bytes.
fn random_layout(random: &mut Random, blocks: usize, unit: usize) -> (PagedLayout, usize) {
    if random.chance(4) {
        let block_bytes = unit * random.between(1, 70);
        let block_stride = block_bytes + unit * random.below(3);
        let layout = PagedLayout::Opaque {
            block_tokens: random.between(1, 4),
            block_bytes,
            block_stride,
        };
        return (layout, (blocks - 1) * block_stride + block_bytes);
    }
    let run_bytes = unit * random.between(1, 9);
    let sizes = [
        blocks,
        random.between(1, 2),
        random.between(1, 4),
        random.between(1, 5),
    ];
    let mut order = [0, 1, 2, 3];
    random.shuffle(&mut order);
    let (mut strides, mut stride, mut reach) = ([0; 4], run_bytes, run_bytes);
    for axis in order {
        stride += unit * if random.chance(3) { random.below(3) } else { 0 };
        strides[axis] = stride;
        reach += (sizes[axis] - 1) * stride;
        stride *= sizes[axis];
    }
    let layout = PagedLayout::Tokens {
        block_tokens: sizes[3],
        block_stride: strides[0],
        token_stride: strides[3],
        planes: sizes[1],
        plane_stride: strides[1],
        heads: sizes[2],
        head_stride: strides[2],
        run_bytes,
    };
    (layout, reach)
}

/// Kernel, width and shape as the executor chooses them: bytes as the host's plan moves them.
#[test]
fn launches_equal_the_hosts_plan() {
    let emulation = Emulation::new();
    let mut widths_seen = [0usize; 17];
    for seed in 0..10_000 {
        let random = &mut Random::new(seed + 1);
        let blocks = random.between(1, 6);
        let unit = [1, 2, 4, 8, 16][random.below(5)];
        let (layout, layer_len) = random_layout(random, blocks, unit);
        layout
            .validate(blocks, layer_len)
            .expect("apart and inside");
        let block = match layout {
            PagedLayout::Opaque { block_tokens, .. } => block_tokens,
            PagedLayout::Tokens { .. } => 1,
        };
        let chunk_tokens = block * random.between(1, 5);
        let num_tokens = block * random.between(1, 12);
        let skip = block * random.below(num_tokens / block + 1);
        let num_layers = random.between(1, 3);

        // Every unit (a token, or an opaque block) at most once; some of them nowhere.
        let paged_tokens = blocks * layout.block_tokens() / block;
        let mut free: Vec<usize> = (0..paged_tokens).collect();
        random.shuffle(&mut free);
        let mut slots = Vec::new();
        for _ in 0..num_tokens / block {
            let unit = if random.chance(6) { None } else { free.pop() };
            slots.extend((0..block).map(|at| unit.map_or(-1, |unit| (unit * block + at) as i64)));
        }

        let direction = [Direction::Gather, Direction::Scatter][random.below(2)];
        let layers_by = [Layers::Many, Layers::One][random.below(2)];
        let lead = unit * random.below(3);
        let mut layers: Vec<Vec<u8>> = (0..num_layers)
            .map(|_| random.bytes(lead + layer_len))
            .collect();
        let lens = (0..num_tokens)
            .step_by(chunk_tokens)
            .map(|start| chunk_tokens.min(num_tokens - start));
        let lens: Vec<usize> = lens.collect();
        let layer_bytes = |tokens| layout.layer_bytes(tokens).expect("small");
        let mut chunks: Vec<Vec<u8>> = lens
            .iter()
            .map(|&tokens| random.bytes(num_layers * layer_bytes(tokens)))
            .collect();

        // What the host does with it.
        let (mut wanted_layers, mut wanted_chunks) = (layers.clone(), chunks.clone());
        for (at, (chunk, &tokens)) in wanted_chunks.iter_mut().zip(&lens).enumerate() {
            let start = at * chunk_tokens;
            let own = Placement::Slots(&slots[start..start + tokens]);
            let skip = skip.saturating_sub(start).min(tokens);
            let plan = CopyPlan::build(&layout, blocks, tokens, skip, own).expect("inside");
            for (layer, paged) in wanted_layers.iter_mut().enumerate() {
                let base = layer * layer_bytes(tokens);
                for run in plan.runs() {
                    let stored = base + run.chunk..base + run.chunk + run.len;
                    let paged = &mut paged[lead + run.paged..lead + run.paged + run.len];
                    match direction {
                        Direction::Gather => chunk[stored].copy_from_slice(paged),
                        Direction::Scatter => paged.copy_from_slice(&chunk[stored]),
                    }
                }
            }
        }

        let units =
            unit_slots(&layout, blocks, num_tokens, Placement::Slots(&slots)).expect("inside");
        let layer_table: Vec<u64> = layers
            .iter_mut()
            .map(|layer| layer[lead..].as_mut_ptr() as u64)
            .collect();
        let chunk_table: Vec<u64> = chunks
            .iter_mut()
            .map(|chunk| chunk.as_mut_ptr() as u64)
            .collect();
        let mut copy = PagedCopy::new(&layout, num_tokens, chunk_tokens, skip).expect("countable");
        copy.chunks = chunk_table.as_ptr() as u64;
        copy.slots = units.as_ptr() as u64;
        let width = copy.vector_width(layer_table.iter().chain(&chunk_table).copied());
        widths_seen[width as usize] += 1;
        let kernel = CopyKernel {
            layers: layers_by,
            direction,
            width,
        };
        match layers_by {
            Layers::Many => {
                copy.layers = layer_table.as_ptr() as u64;
                copy.num_layers = num_layers as u32;
                if let Some(shape) = LaunchShape::of(&copy, width) {
                    emulation.launch(kernel, shape, &copy);
                }
            }
            Layers::One => {
                copy.num_layers = 1;
                for (layer, &address) in layer_table.iter().enumerate() {
                    copy.layers = address;
                    copy.chunk_layer = layer as u32;
                    if let Some(shape) = LaunchShape::of(&copy, width) {
                        emulation.launch(kernel, shape, &copy);
                    }
                }
            }
        }
        assert!(
            layers == wanted_layers,
            "the cache differs; seed {seed}, {copy:?}"
        );
        assert!(
            chunks == wanted_chunks,
            "a chunk differs; seed {seed}, {copy:?}"
        );
    }
    for width in [1, 2, 4, 8, 16] {
        assert!(
            widths_seen[width] > 100,
            "{width}-byte vectors: {widths_seen:?}"
        );
    }
}
