//! Compiles the kernels of `csrc/` into one fatbin where an nvcc is found; without one the build has none and
//! says so. `LMCACHE_RS_REQUIRE_CUDA=1` makes that an error, for wheels that must have them.

use std::env;
use std::error::Error;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Compute capabilities with code of their own; a later 8.x or 12.x runs that of the one before.
const ARCHITECTURES: [u32; 8] = [75, 80, 86, 89, 90, 100, 103, 120];
/// Those whose PTX is added: the driver compiles it for any GPU that no code fits.
const PTX: [u32; 2] = [75, 120];
/// Where PyPI's packages put it, from the folder of all packages.
const IN_SITE_PACKAGES: [&str; 1] = ["nvidia/cu13/bin/nvcc"];
const ENVIRONMENT: [&str; 6] = [
    "LMCACHE_RS_REQUIRE_CUDA",
    "LMCACHE_RS_WITHOUT_CUDA",
    "CUDA_HOME",
    "PATH",
    "PYO3_PYTHON",
    "VIRTUAL_ENV",
];

fn main() -> Result<(), Box<dyn Error>> {
    for name in ENVIRONMENT {
        println!("cargo::rerun-if-env-changed={name}");
    }
    let sources = PathBuf::from(variable("CARGO_MANIFEST_DIR")?).join("../../csrc");
    let out = PathBuf::from(variable("OUT_DIR")?);
    for name in SOURCES {
        println!("cargo::rerun-if-changed={}", sources.join(name).display());
    }
    println!("cargo::rerun-if-changed=build.rs");
    let required = switch("LMCACHE_RS_REQUIRE_CUDA");
    let built = if switch("LMCACHE_RS_WITHOUT_CUDA") {
        Err("LMCACHE_RS_WITHOUT_CUDA is set".into())
    } else {
        build(&sources, &out)
    };
    let (nvcc, absent_because) = match built {
        Ok(version) => (version, String::new()),
        Err(reason) if required => {
            return Err(format!(
                "LMCACHE_RS_REQUIRE_CUDA is set, and the CUDA kernels cannot be built: {reason}"
            )
            .into());
        }
        Err(reason) => {
            fs::write(out.join("kernels.fatbin"), [])?;
            (String::new(), reason.to_string())
        }
    };
    let architectures: &[u32] = if nvcc.is_empty() { &[] } else { &ARCHITECTURES };
    let ptx: &[u32] = if nvcc.is_empty() { &[] } else { &PTX };
    let facts = format!(
        "KernelBuild {{ nvcc: {nvcc:?}, architectures: &{architectures:?}, ptx: &{ptx:?}, absent_because: {absent_because:?} }}"
    );
    fs::write(out.join("kernel_build.rs"), facts)?;
    Ok(())
}

const SOURCES: [&str; 3] = ["paged_copy.h", "paged_copy.cu", "rope_shift.cu"];

/// Compiles all sources as one module and answers nvcc's version.
fn build(sources: &Path, out: &Path) -> Result<String, Box<dyn Error>> {
    let nvcc = find_nvcc()?;
    let version = version_of(&nvcc)?;
    let (unit, fatbin) = (out.join("kernels.cu"), out.join("kernels.fatbin"));
    let includes = SOURCES[1..]
        .iter()
        .map(|name| format!("#include \"{name}\"\n"));
    let includes: String = includes.collect();
    let mut command = Command::new(&nvcc);
    command.args(["--fatbin", "-std=c++17", "-O3", "--threads=2"]);
    for (code, list) in [("sm", &ARCHITECTURES[..]), ("compute", &PTX[..])] {
        for arch in list {
            command.arg(format!("-gencode=arch=compute_{arch},code={code}_{arch}"));
        }
    }
    command.arg("-I").arg(sources).arg(&unit);
    command.arg("-o").arg(&fatbin);

    // A PATH that changed is a reason to look again, not to compile again.
    let mut hasher = DefaultHasher::new();
    for name in SOURCES {
        fs::read(sources.join(name))?.hash(&mut hasher);
    }
    let made_of = format!("{version} {command:?} {:x}", hasher.finish());
    let stamp = out.join("kernels.stamp");
    let same = fs::read_to_string(&stamp).is_ok_and(|text| text == made_of);
    if same && fs::metadata(&fatbin).is_ok_and(|file| file.len() > 0) {
        return Ok(version);
    }

    fs::write(&unit, includes)?;
    let done = command.output()?;
    if !done.status.success() {
        let said = String::from_utf8_lossy(&done.stderr);
        return Err(format!("{} failed: {}", nvcc.display(), said.trim()).into());
    }
    fs::write(&stamp, made_of)?;
    Ok(version)
}

/// nvcc on the PATH, under CUDA_HOME, or among the packages of the Python at hand.
fn find_nvcc() -> Result<PathBuf, Box<dyn Error>> {
    let on_path = variable("PATH").unwrap_or_default();
    let mut places: Vec<PathBuf> = env::split_paths(&on_path)
        .map(|folder| folder.join("nvcc"))
        .collect();
    places.extend(variable("CUDA_HOME").map(|home| Path::new(&home).join("bin/nvcc")));
    if let Some(found) = places.into_iter().find(|place| place.is_file()) {
        return Ok(found);
    }
    let mut pythons: Vec<PathBuf> = Vec::new();
    pythons.extend(variable("PYO3_PYTHON").map(PathBuf::from));
    pythons.extend(variable("VIRTUAL_ENV").map(|home| Path::new(&home).join("bin/python")));
    pythons.push("python3".into());
    for python in pythons {
        let asked = "import sys; print(*sys.path, sep='\\n')";
        let Ok(told) = Command::new(python).args(["-c", asked]).output() else {
            continue;
        };
        let told = String::from_utf8_lossy(&told.stdout).into_owned();
        let places = told.lines().flat_map(|folder| {
            IN_SITE_PACKAGES
                .iter()
                .map(move |inside| Path::new(folder).join(inside))
        });
        if let Some(found) = places.into_iter().find(|place| place.is_file()) {
            return Ok(found);
        }
    }
    Err(
        "no nvcc on the PATH, under CUDA_HOME, or among Python's packages (`pip install -r requirements/nvcc.txt`)"
            .into(),
    )
}

/// The release, e.g. `13.0.88`.
fn version_of(nvcc: &Path) -> Result<String, Box<dyn Error>> {
    let told = Command::new(nvcc).arg("--version").output()?;
    let told = String::from_utf8_lossy(&told.stdout).into_owned();
    let version = told
        .split_whitespace()
        .find_map(|word| word.strip_prefix('V').filter(|rest| rest.contains('.')));
    let version = version.ok_or_else(|| format!("{} tells no version", nvcc.display()))?;
    Ok(version.to_owned())
}

fn switch(name: &str) -> bool {
    variable(name).is_ok_and(|value| !matches!(value.as_str(), "" | "0"))
}

#[expect(
    clippy::disallowed_methods,
    reason = "cargo speaks through the environment"
)]
fn variable(name: &str) -> Result<String, env::VarError> {
    env::var(name)
}
