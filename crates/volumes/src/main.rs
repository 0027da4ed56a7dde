//! The program `nacre-volumes`: reads its arguments, serves, lists, puts in order.
#![forbid(unsafe_code)]

use clap::{ArgMatches, error::ErrorKind};
use nacre_volumes::{Failure, Kind, Listening, Nacre, Store, Volumes, arguments, serve};
use std::{
    io::Write,
    path::{Path, PathBuf},
    process::ExitCode,
};

fn main() -> ExitCode {
    let matches = match arguments::command().try_get_matches() {
        Ok(matches) => matches,
        Err(error) => {
            // A closed standard output is no failure of a help text.
            let _ = error.print();
            let help = matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
            return if help { ExitCode::SUCCESS } else { ExitCode::from(2) };
        }
    };
    match run(&matches) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("nacre-volumes: {failure}");
            ExitCode::from(match failure.kind {
                Kind::Invalid => 2,
                Kind::Missing => 3,
                Kind::InUse | Kind::Busy => 5,
                Kind::Exists | Kind::Failed => 1,
            })
        }
    }
}

fn run(matches: &ArgMatches) -> Result<(), Failure> {
    let Some((verb, words)) = matches.subcommand() else { return Ok(()) };
    if verb == "man"
        && let Some(directory) = words.get_one::<PathBuf>("directory")
    {
        let failed = |error: std::io::Error| Failure::io("write man pages to", directory, &error);
        std::fs::create_dir_all(directory).map_err(failed)?;
        return clap_mangen::generate_to(arguments::command(), directory).map_err(failed);
    }
    let volumes = volumes(words)?;
    match verb {
        "serve" => serve(&listening(words)?, volumes),
        "list" => print(&list(&volumes, words.get_flag("json"))?),
        "metrics" => print(&volumes.metrics()?),
        "tend" => {
            volumes.tend()?;
            if words.get_flag("backup") { volumes.back_up() } else { Ok(()) }
        }
        _ => {
            let name = words.get_one::<String>("volume").map(String::as_str).unwrap_or_default();
            volumes.get(name)?;
            match words.get_one::<String>("caller") {
                Some(caller) => volumes.unmount(name, caller),
                None => volumes.unmount_all(name),
            }
        }
    }
}

fn volumes(words: &ArgMatches) -> Result<Volumes, Failure> {
    let state = words.get_one::<PathBuf>("state").cloned().or_else(arguments::default_state);
    let Some(state) = state else {
        return Err(Failure::new(Kind::Invalid, "neither --state nor HOME names a state directory"));
    };
    let program = words.get_one::<PathBuf>("nacre").cloned().unwrap_or_else(arguments::default_nacre);
    Volumes::new(Store::open(&state)?, Nacre { program })
}

fn listening(words: &ArgMatches) -> Result<Listening, Failure> {
    if let Some(path) = words.get_one::<PathBuf>("socket") {
        return Listening::new(path);
    }
    if let Some(given) = Listening::given()? {
        return Ok(given);
    }
    match arguments::default_socket() {
        Some(path) => Listening::new(&path),
        None => Err(Failure::new(Kind::Invalid, "neither --socket nor XDG_RUNTIME_DIR names a socket")),
    }
}

fn list(volumes: &Volumes, json: bool) -> Result<String, Failure> {
    let list = volumes.list()?;
    if json {
        let rows: Vec<serde_json::Value> = list.iter().map(|volume| volumes.row(volume)).collect();
        return Ok(format!("{:#}\n", serde_json::Value::from(rows)));
    }
    let mut text = format!("{:<32} {:>14} {:>14} {:>7}  {}\n", "VOLUME", "USED", "LIMIT", "HOLDERS", "PATH");
    for (volume, figures) in list.iter().zip(volumes.figures(&list)) {
        let shown = |number: Option<u64>| number.map_or("-".to_owned(), |number| number.to_string());
        text.push_str(&format!(
            "{:<32} {:>14} {:>14} {:>7}  {}\n",
            volume.name(),
            shown(figures.used),
            shown(figures.limit),
            volume.holders(),
            volume.at.display()
        ));
    }
    Ok(text)
}

fn print(text: &str) -> Result<(), Failure> {
    let mut output = std::io::stdout().lock();
    match output.write_all(text.as_bytes()).and_then(|()| output.flush()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Failure::io("write to", Path::new("standard output"), &error))
        }
        _ => Ok(()),
    }
}
