//! The plots of the HTML page, drawn as SVG by plotters: ratios of times as bars, throughput over
//! file size as curves.

use std::fmt::Display;

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::measured_columns;
use crate::failure::Failure;
use crate::report::{Cell, Report, TargetEntry};
use crate::stats::median;
use crate::summary::Section;

const WIDTH: u32 = 1150;
const LEGEND: u32 = 180;
const BAR: u32 = 11;
/// Colours that colour-blind readers can distinguish (Okabe and Ito), then darker ones of the same hues.
const COLOURS: [RGBColor; 12] = [
    RGBColor(0, 0, 0),
    RGBColor(86, 180, 233),
    RGBColor(0, 158, 115),
    RGBColor(230, 159, 0),
    RGBColor(213, 94, 0),
    RGBColor(204, 121, 167),
    RGBColor(0, 114, 178),
    RGBColor(120, 94, 240),
    RGBColor(100, 143, 255),
    RGBColor(0, 90, 65),
    RGBColor(130, 60, 0),
    RGBColor(110, 110, 110),
];

/// Lines at the ticks.
const GRID: RGBColor = RGBColor(222, 222, 222);

fn failed(error: impl Display) -> Failure {
    Failure::new(format!("drawing a plot: {error}"))
}

fn colour(column: usize) -> RGBColor {
    COLOURS.get(column % COLOURS.len()).copied().unwrap_or(BLACK)
}

/// Returns the ticks of a logarithmic axis: 1, 2 and 5 of each power of ten, or the powers alone where that would
/// be too many.
fn ticks(from: f64, to: f64) -> Vec<f64> {
    const MOST: usize = 10;
    let powers = || (from.log10().floor() as i32..=to.log10().ceil() as i32).map(|power| 10_f64.powi(power));
    let within = |tick: &f64| (from..=to).contains(tick);
    let all: Vec<f64> = powers().flat_map(|power| [power, 2.0 * power, 5.0 * power]).filter(within).collect();
    if all.len() <= MOST { all } else { powers().filter(within).collect() }
}

/// Hides the library's own labels, which overlap on logarithmic axes; [`ticks`] are drawn instead.
fn no_label(_tick: &f64) -> String {
    String::new()
}

/// Formats a tick's label, with no more digits than it needs: 0.05, 2, 100.
fn label(tick: f64) -> String {
    let digits = (-tick.log10().floor()).max(0.0) as usize;
    format!("{tick:.digits$}")
}

/// Draws the ratio of times per test and target, as horizontal bars on a logarithmic axis from 1, which is the
/// baseline.
pub fn ratios(report: &Report, section: &Section) -> Result<String, Failure> {
    let is_baseline = |column: usize| report.targets.get(column).is_none_or(|target| target.id == target.baseline);
    let columns: Vec<usize> = measured_columns(report).into_iter().filter(|column| !is_baseline(*column)).collect();
    let shown = section
        .rows
        .iter()
        .flat_map(|row| columns.iter().filter_map(|column| row.entries.get(*column).copied().flatten()));
    let (least, most) =
        shown.fold((0.5_f64, 2.0_f64), |(least, most), entry| (least.min(entry.ratio), most.max(entry.ratio)));
    let slots = columns.len() + 1;
    let height = 90 + BAR * u32::try_from(slots * section.rows.len()).unwrap_or(1000);
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, (WIDTH, height)).into_drawing_area();
        area.fill(&WHITE).map_err(failed)?;
        let (plot, strip) = area.split_horizontally(WIDTH - LEGEND);
        let rows = section.rows.len() as f64;
        let mut chart = ChartBuilder::on(&plot)
            .margin(10)
            .x_label_area_size(40)
            .y_label_area_size(220)
            .build_cartesian_2d((least * 0.9..most * 1.1).log_scale(), rows..0.0)
            .map_err(failed)?;
        let mut mesh = chart.configure_mesh();
        mesh.disable_mesh().y_labels(0).x_label_formatter(&no_label);
        mesh.x_desc("time, as a multiple of the baseline's (shorter is better)").draw().map_err(failed)?;
        for tick in ticks(least * 0.9, most * 1.1) {
            chart.draw_series(LineSeries::new([(tick, 0.0), (tick, rows)], GRID)).map_err(failed)?;
            let (x, y) = chart.backend_coord(&(tick, rows));
            let style = ("sans-serif", 12).into_font().color(&BLACK).pos(Pos::new(HPos::Center, VPos::Top));
            area.draw_text(&label(tick), &style, (x, y + 6)).map_err(failed)?;
        }
        for (place, row) in section.rows.iter().enumerate() {
            let (x, y) = chart.backend_coord(&(least * 0.9, place as f64 + 0.4));
            let style = ("sans-serif", 13).into_font().color(&BLACK);
            let style = style.pos(Pos::new(HPos::Right, VPos::Center));
            area.draw_text(&row.title, &style, (x - 8, y)).map_err(failed)?;
        }
        for (slot, column) in columns.iter().enumerate() {
            let bars = section.rows.iter().enumerate().filter_map(|(place, row)| {
                let entry = row.entries.get(*column).copied().flatten()?;
                let top = place as f64 + slot as f64 / slots as f64;
                Some(Rectangle::new([(1.0, top), (entry.ratio, top + 0.9 / slots as f64)], colour(*column).filled()))
            });
            chart.draw_series(bars).map_err(failed)?;
        }
        legend(&strip, report, columns.iter().copied())?;
        area.present().map_err(failed)?;
    }
    Ok(svg)
}

/// Draws the names of the columns next to their colours, in a strip of its own that hides nothing.
fn legend(
    strip: &DrawingArea<SVGBackend<'_>, Shift>,
    report: &Report,
    columns: impl Iterator<Item = usize>,
) -> Result<(), Failure> {
    for (line, column) in columns.enumerate() {
        let y = 30 + 18 * i32::try_from(line).unwrap_or(0);
        strip.draw(&Rectangle::new([(4, y), (16, y + 9)], colour(column).filled())).map_err(failed)?;
        let style = ("sans-serif", 13).into_font().color(&BLACK).pos(Pos::new(HPos::Left, VPos::Center));
        strip.draw_text(&title(report, column), &style, (22, y + 5)).map_err(failed)?;
    }
    Ok(())
}

fn title(report: &Report, column: usize) -> String {
    report.targets.get(column).map_or_else(String::new, |target| target.title.clone())
}

/// Draws one plot for each test with points: throughput over file size, a curve per target. Where several record
/// sizes were measured, the best of them counts at each file size.
pub fn curves(report: &Report) -> Result<Vec<String>, Failure> {
    let mut plots = Vec::new();
    for test in &report.tests {
        let curves: Vec<(usize, Vec<(f64, f64)>)> = report
            .targets
            .iter()
            .enumerate()
            .map(|(column, target)| (column, curve(report, &test.id, target)))
            .filter(|(_, curve)| !curve.is_empty())
            .collect();
        if !curves.is_empty() {
            plots.push(draw_curves(report, &test.title, &curves)?);
        }
    }
    Ok(plots)
}

fn curve(report: &Report, test: &str, target: &TargetEntry) -> Vec<(f64, f64)> {
    let mut best: Vec<(u64, f64)> = Vec::new();
    for (cell, file) in report.cells_of(test, &target.id).filter_map(|cell| cell.point.map(|point| (cell, point.file)))
    {
        let Some(rate) = megabytes(cell) else { continue };
        match best.iter_mut().find(|(size, _)| *size == file) {
            Some((_, known)) => *known = known.max(rate),
            None => best.push((file, rate)),
        }
    }
    best.sort_by_key(|(size, _)| *size);
    best.into_iter().map(|(size, rate)| (size as f64 / 1024.0, rate)).collect()
}

fn megabytes(cell: &Cell) -> Option<f64> {
    median(&cell.samples).filter(|seconds| *seconds > 0.0).map(|seconds| cell.amount / seconds / 1e6)
}

fn size(kib: f64) -> String {
    if kib >= 1024.0 { format!("{:.0} MiB", kib / 1024.0) } else { format!("{kib:.0} KiB") }
}

fn draw_curves(report: &Report, name: &str, curves: &[(usize, Vec<(f64, f64)>)]) -> Result<String, Failure> {
    let points = || curves.iter().flat_map(|(_, curve)| curve.iter().copied());
    let (left, right) = points().fold((f64::MAX, 0.0_f64), |(left, right), (x, _)| (left.min(x), right.max(x)));
    let (low, high) = points().fold((f64::MAX, 0.0_f64), |(low, high), (_, y)| (low.min(y), high.max(y)));
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, (WIDTH, 420)).into_drawing_area();
        area.fill(&WHITE).map_err(failed)?;
        let (plot, strip) = area.split_horizontally(WIDTH - LEGEND);
        let (floor, ceiling) = (low * 0.7, high * 1.4);
        let mut chart = ChartBuilder::on(&plot)
            .margin(10)
            .caption(name, ("sans-serif", 18))
            .x_label_area_size(40)
            .y_label_area_size(80)
            // One file size is still a plot: the axis needs some width.
            .build_cartesian_2d((left * 0.8..right * 1.25).log_scale().base(2.0), (floor..ceiling).log_scale())
            .map_err(failed)?;
        chart
            .configure_mesh()
            .x_desc("file size")
            .x_label_formatter(&|kib| size(*kib))
            .disable_y_mesh()
            .y_label_formatter(&no_label)
            .y_desc("MB/s")
            .light_line_style(BLACK.mix(0.05))
            .draw()
            .map_err(failed)?;
        for tick in ticks(floor, ceiling) {
            chart.draw_series(LineSeries::new([(left * 0.8, tick), (right * 1.25, tick)], GRID)).map_err(failed)?;
            let (x, y) = chart.backend_coord(&(left * 0.8, tick));
            let style = ("sans-serif", 12).into_font().color(&BLACK).pos(Pos::new(HPos::Right, VPos::Center));
            area.draw_text(&label(tick), &style, (x - 6, y)).map_err(failed)?;
        }
        for (column, curve) in curves {
            let own = colour(*column);
            chart
                .draw_series(LineSeries::new(curve.iter().copied(), own.stroke_width(2)).point_size(3))
                .map_err(failed)?;
        }
        legend(&strip, report, curves.iter().map(|(column, _)| *column))?;
        area.present().map_err(failed)?;
    }
    Ok(svg)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_stay_apart() {
        assert_eq!(ticks(0.45, 14.0), [0.5, 1.0, 2.0, 5.0, 10.0]);
        assert_eq!(ticks(0.45, 2.2), [0.5, 1.0, 2.0]);
        assert_eq!(ticks(0.009, 1500.0), [0.01, 0.1, 1.0, 10.0, 100.0, 1000.0]);
        let report = crate::sample_report::report();
        let sections = crate::summary::sections(&report);
        let plot = ratios(&report, sections.first().unwrap()).unwrap();
        assert!(plot.contains("\n1\n") && plot.contains("\n2\n"), "{plot}");
        assert!(!plot.contains("\n1.0\n"), "one label at each tick: {plot}");
        assert_eq!([0.02, 0.5, 1.0, 2000.0].map(label), ["0.02", "0.5", "1", "2000"]);
    }
}
